"""Several answers per prompt: data with scores, or with lists of chosen and rejected answers, of which pairs train."""

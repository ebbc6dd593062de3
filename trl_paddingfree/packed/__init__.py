"""`check_packed`: whether packed rows of others are exact."""

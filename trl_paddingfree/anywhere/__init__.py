"""`padding_free(model)`: flat calls in any trainer."""

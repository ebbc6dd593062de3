"""All that concerns images: of examples, of rows, of models, and their part of the start-up check."""

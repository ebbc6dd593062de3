"""The proof goes on while a model trains: batches that it is about to train on, flat and row by row."""

"""What is wrong with data, said before anything is computed."""

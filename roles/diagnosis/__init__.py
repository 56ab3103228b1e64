"""What is wrong with a host, by its logs and its state; nothing is changed."""

"""What a node should be: pure Python, without pyinfra, network or files written."""

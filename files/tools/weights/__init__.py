"""Model weights that arrive whole and checked: the parts of weights_agent.py. Standard library only, Python 3.10."""

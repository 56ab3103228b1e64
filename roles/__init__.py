"""How a host gets to its Plan. One folder a role; roles import node and kit, never each other."""

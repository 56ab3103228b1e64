"""What every other role stands on: system packages, users, folders, and the programs that run on the node."""

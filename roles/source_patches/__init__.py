"""Exact edits of a release's sources, made before it becomes current, each with the evidence that it is needed."""

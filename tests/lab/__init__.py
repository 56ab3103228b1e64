"""Throw-away machines with everything real but the GPU. docs/lab.md tells what is a stand-in; `bin/lab` drives it."""

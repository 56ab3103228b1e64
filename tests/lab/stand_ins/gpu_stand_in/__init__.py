"""Stand-ins for the programs that name a machine's GPUs: nvidia_smi and lspci print the machine described to them.

They know forms, not hardware: nothing here measures, computes or talks to a device; docs/lab.md lists what that hides.
Python 3.10, standard library only: this package lies in /usr/lib/gpu-stand-in of a lab machine.
"""

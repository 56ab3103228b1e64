"""The lab's machines that are up (bin/lab up 1). Their settings are in group_data/lab.py beside this file."""

from tests.lab.inventory import hosts as machines

hosts = machines()

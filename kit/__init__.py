"""What pyinfra lacks, one module a need. Only this package touches the insides of pyinfra, paramiko and gevent.

This file imports nothing: `kit.on_host` is sent to the hosts and must import there, where there is no pyinfra.
"""

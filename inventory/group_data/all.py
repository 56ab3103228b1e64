"""What holds for every node. Every key with its default is in docs/inventory.md; a key that is not there is an
error."""

ssh_user = "root"  # or a user with sudo, and then `_sudo = True`
ssh_strict_host_key_checking = "yes"  # a host whose key is not in known_hosts is refused

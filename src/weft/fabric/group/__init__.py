"""The group fabric: ranks on several machines, with a network between them."""

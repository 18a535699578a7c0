"""The entry point of a container, which runs a command and coordinates it with the other nodes of its job.

This package must not import torch.
"""

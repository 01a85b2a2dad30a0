"""Devices that blocks are computed on, and transfers between them and host memory."""

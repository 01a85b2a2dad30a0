"""The devices that blocks are computed on, and the transfers between them and host memory."""

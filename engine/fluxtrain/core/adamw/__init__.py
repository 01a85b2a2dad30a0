"""AdamW's numerics: the reference, native and Triton kernels, and one dispatcher."""

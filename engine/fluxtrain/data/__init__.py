"""Files to rows to tokens to packed batches."""

"""`fluxtrain.wrap`: find blocks, group parameters, patch the model, drive the engine."""

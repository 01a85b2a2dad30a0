"""What becomes of a model for llama.cpp and what is built on it: one GGUF file, checked."""

extern "C" __attribute__((visibility("default"))) int flux_abi_version() { return 1; }

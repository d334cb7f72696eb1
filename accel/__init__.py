"""The device side: model, KV cache, sampler, executor. Knows nothing of gRPC."""

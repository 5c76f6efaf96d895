"""Models on device meshes: tensor, pipeline, context and expert parallelism, precision, memory."""

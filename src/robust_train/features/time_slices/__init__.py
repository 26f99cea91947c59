"""GPUs shared over time: a job leaves its GPU when another user waits (``gpu_slice_minutes``)."""

"""UUIDs of the machine with two GPUs on which much of the launcher is tested."""

A = "GPU-aaaaaaaa-0000-0000-0000-000000000000"
B = "GPU-bbbbbbbb-0000-0000-0000-000000000000"

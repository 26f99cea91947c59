"""The page of a job, its goodput, and advice on its speed."""

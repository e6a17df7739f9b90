"""What runs next: requests, the scheduler, its policies, and the blocks of the paged KV cache."""

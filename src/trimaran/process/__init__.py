"""Child processes: typed settings, a life bound to the parent's, a voice when they fail."""

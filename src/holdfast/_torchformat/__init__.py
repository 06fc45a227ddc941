"""The codec of torch's own files; the only package that may use pickle or torch.save and torch.load."""

"""The viewer: pages in a browser that show runs, checkpoints and tensors. ``assets/`` has them, here is what answers.

A server on the loopback interface answers questions about numbers: of sources, checkpoints, tensors, tasks. No text of
a request is the name of a file. Nothing is written or unpickled. What a checkpoint says is text that anybody may have
written: it is checked when it is read, and bounded when it is sent.
"""

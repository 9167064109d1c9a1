"""What faults are done with: links, sockets, processes, file systems, tensors."""

"""What is trained, on what, by which loss: method, task, objective, optimizer."""

"""What is trained, and by which loss: method, objective, optimizer."""

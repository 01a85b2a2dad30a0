"""What is trained, and with which loss: method, objective, optimizer."""

"""What all APIs share of HTTP: the door, errors, streams, clients that go away."""

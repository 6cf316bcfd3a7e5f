"""What controllers and brokers say, and how they are told what to do."""

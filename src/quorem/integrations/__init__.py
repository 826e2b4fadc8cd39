"""Using quorem with other libraries. Each module needs its library; ``import quorem`` imports none of them."""

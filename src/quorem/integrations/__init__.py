"""quorem inside other libraries. Each needs its library installed; none is imported by ``import quorem``."""

"""The composed lookup and bag: one plain reference, one fused version per device, one declaration."""

"""Auto-sharding: a mesh and a sharding rule for a step written for one device, chosen by planning layouts."""

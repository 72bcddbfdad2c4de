"""The mesh search: plans a step on every mesh of a topology, and ranks the meshes."""

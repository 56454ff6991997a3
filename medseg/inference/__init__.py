"""One network over one image: tiles, slabs, backends and export, and the clean-up of its labels."""

"""Model folders of nnU-Net: read as inert data and run in bounded memory with its labels."""

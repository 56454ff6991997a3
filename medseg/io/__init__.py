"""File input and output; the only package that imports nibabel, pydicom and SimpleITK."""

"""Tests of a real pretrained model; a package, so that its fixtures end with its last test."""

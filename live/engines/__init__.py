"""Engines that can be observed and set while they run, behind one interface."""

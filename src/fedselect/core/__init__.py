"""The foundation: trees and masks, keyed random numbers, options, checks, errors, files, snapshots."""

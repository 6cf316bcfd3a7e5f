"""Updates: follows the accepted chain, stages versions and activates them."""

"""Small trained networks of visattn: folders of weights and cards, and no code. `visattn.data.network_path` finds them."""

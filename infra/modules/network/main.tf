# One private subnet without a way to the internet: what the nodes need comes through endpoints (endpoints.tf).

resource "aws_vpc" "this" {
  #checkov:skip=CKV2_AWS_12: the default group is the nodes' group on purpose, see below; it lets in the nodes and nobody else
  cidr_block           = var.cidr
  enable_dns_support   = true
  enable_dns_hostnames = true # private names of the endpoints

  tags = { Name = var.name }
}

resource "aws_subnet" "nodes" {
  vpc_id                  = aws_vpc.this.id
  cidr_block              = cidrsubnet(var.cidr, 1, 0)
  availability_zone       = var.availability_zone
  map_public_ip_on_launch = false # an instance with several interfaces gets no public address anyway

  tags = { Name = "${var.name}-nodes" }
}

resource "aws_route_table" "nodes" {
  vpc_id = aws_vpc.this.id
  tags   = { Name = "${var.name}-nodes" }
}

resource "aws_route_table_association" "nodes" {
  subnet_id      = aws_subnet.nodes.id
  route_table_id = aws_route_table.nodes.id
}

# The nodes' group is the VPC's default group. The interfaces of a multi-node job take the groups of the compute
# environment or, where it has none, this one; and a compute environment whose launch template lists network
# interfaces can have none. So both the instances and the containers of a multi-node job are in this group.
resource "aws_default_security_group" "nodes" {
  vpc_id = aws_vpc.this.id

  ingress {
    description = "EFA and rendezvous: everything among the nodes"
    protocol    = "-1"
    from_port   = 0
    to_port     = 0
    self        = true
  }

  egress {
    description = "EFA and rendezvous: everything among the nodes; EFA needs the rule in both directions"
    protocol    = "-1"
    from_port   = 0
    to_port     = 0
    self        = true
  }

  egress {
    description     = "S3 through its gateway"
    protocol        = "tcp"
    from_port       = 443
    to_port         = 443
    prefix_list_ids = [aws_vpc_endpoint.s3.prefix_list_id]
  }

  egress {
    description     = "AWS services through their endpoints"
    protocol        = "tcp"
    from_port       = 443
    to_port         = 443
    security_groups = [aws_security_group.endpoints.id]
  }

  tags = { Name = "${var.name}-nodes" }
}

output "subnet_id" {
  value       = aws_subnet.nodes.id
  description = "The private subnet of all nodes."
}

output "nodes_security_group_id" {
  value       = aws_default_security_group.nodes.id
  description = "Group of all nodes and of the interfaces of multi-node jobs: the VPC's default group."
}

output "endpoints" {
  value       = merge({ s3 = aws_vpc_endpoint.s3.id }, { for service, made in aws_vpc_endpoint.service : service => made.id })
  description = "Endpoints by service."
}

output "trainium_environment_arn" {
  value       = aws_batch_compute_environment.trainium.arn
  description = "Compute environment of Trainium instances."
}

output "cpu_environment_arn" {
  value       = aws_batch_compute_environment.cpu.arn
  description = "Compute environment of CPU instances."
}
